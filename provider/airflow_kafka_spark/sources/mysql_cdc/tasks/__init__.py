"""Reading and decoding the binary log. Runs on executors."""
