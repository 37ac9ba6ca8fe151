"""In which dtypes a model computes, communicates and is updated."""
