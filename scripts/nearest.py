#!/usr/bin/env python3
"""Prints the nearest text to each picture of `vlmrun embed PICTURES -t TEXTS -o VECTORS.npy`."""

import json
import sys

import numpy as np

if len(sys.argv) != 2:
    sys.exit("usage: nearest.py VECTORS.npy")
try:
    vectors = np.load(sys.argv[1])
    with open(sys.argv[1] + ".jsonl", encoding="utf-8") as lines:
        rows = [row for row in map(json.loads, lines) if "index" in row]
except OSError as error:
    sys.exit(f"nearest.py: {error.filename}: {error.strerror}; vlmrun embed -o writes both files")
except (EOFError, ValueError):
    sys.exit(f"nearest.py: {sys.argv[1]} is no array, or the file beside it no JSON Lines")
texts = [row for row in rows if "text" in row]
if not texts:
    sys.exit(f"nearest.py: {sys.argv[1]} holds no vector of a text; embed some with -t")
text_vectors = vectors[[row["index"] for row in texts]]
for row in rows:
    if "path" in row:
        cosines = text_vectors @ vectors[row["index"]]  # unit vectors
        best = int(cosines.argmax())
        print(row["path"], texts[best]["text"], f"{cosines[best]:.3f}", sep="\t")
