"""Plans a run's layout, batch, learning rate and model shape, without I/O or torch."""
