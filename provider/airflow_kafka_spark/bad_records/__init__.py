"""What becomes of records that cannot be decoded, transformed or written."""
