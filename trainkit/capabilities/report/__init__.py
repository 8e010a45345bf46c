"""Reports on runs: the page of a run or of a group, and the comparison of runs in the terminal."""
