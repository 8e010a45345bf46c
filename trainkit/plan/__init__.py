"""What will run: layout, batch, learning rate and model shape, as arithmetic without I/O or torch."""
