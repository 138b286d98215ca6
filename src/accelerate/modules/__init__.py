"""What is done to and asked of modules: compilation, wrappers, tensors and names."""
