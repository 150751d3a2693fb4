"""Speed and scale, measured as ratios in one run. `python -m benchmarks` runs all; never part of the tests."""
