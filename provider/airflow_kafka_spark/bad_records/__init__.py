"""Records that cannot be decoded, transformed or written: the options for them, and the dead letter topic."""
