"""What tasks on executors run of this package."""
