"""Events and the reading of splits. Runs on executors."""
