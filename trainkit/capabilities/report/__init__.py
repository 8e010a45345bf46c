"""Reports on runs: an HTML page for a run or a group, and a comparison of runs in the terminal."""
