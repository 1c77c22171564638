"""Messages between ranks: batch sums, eigenbases and scalars."""
