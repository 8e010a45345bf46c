"""Plans a run's layout, batch, learning rate and model dimensions, without I/O or torch."""
