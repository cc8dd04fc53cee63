"""Reading and decoding the log. Runs on executors."""
