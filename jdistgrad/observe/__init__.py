"""Looking at an installation and at what a world does."""
