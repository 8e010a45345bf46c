"""A fire drill: a config's training, shortened, interrupted in every way that can be tried here.

The curve of each interrupted run is held against that of one which nobody touched.
"""
