"""Messages between ranks. They contain batch sums, gradients, eigenbases, results and scalars."""
