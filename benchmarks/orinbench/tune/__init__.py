"""`orinbench tune`: what tinygrad's beam search found, kept as data that can be carried."""
