"""The parts of :mod:`kda.nn`, none of which knows the layer: caches, projections, convolutions, documents and padding,
checkpoints, and the steps and training of all parts at once."""
