"""Reports on runs: an HTML page about a run or a group, and a comparison of runs in the terminal."""
