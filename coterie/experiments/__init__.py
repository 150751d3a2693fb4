"""Scripts of the papers' experiments, and the engine that runs them (`coterie reproduce`)."""
