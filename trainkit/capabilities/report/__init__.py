"""Reports of what runs did: a page of a run or of a group, and runs side by side in the terminal."""
