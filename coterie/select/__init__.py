"""Everything that chooses: compare, tune, auto, advise and plan."""
