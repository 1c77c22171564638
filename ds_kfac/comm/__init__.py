"""Messages between ranks: batch sums, eigenbases, scalars."""
