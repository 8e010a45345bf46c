"""The screens of `trainkit watch`: a run or many, live in a terminal or printed once."""
