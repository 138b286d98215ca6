"""Operations on modules: compilation, wrappers, tensors and names."""
