"""Command-line tools beside the training job."""
