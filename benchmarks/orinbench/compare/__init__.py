"""`orinbench compare A B`: saved results, runs of the history, or revisions of the patch series."""
