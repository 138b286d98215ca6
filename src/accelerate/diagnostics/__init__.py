"""What a run says of itself: why it waits."""
