"""The parts of :mod:`kda.nn`: caches, projections, convolutions, documents and padding, checkpoints."""
