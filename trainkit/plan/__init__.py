"""Plans a run: layout, batch, learning rate and model shape, without I/O or torch."""
