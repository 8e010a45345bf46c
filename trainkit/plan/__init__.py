"""Plans a run: its layout, batch, learning rate and model shape, without I/O or torch."""
