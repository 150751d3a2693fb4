"""Training: fit, resume, run folders, checkpoints, predictions, exports and newcomers."""
