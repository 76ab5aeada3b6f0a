"""JSON Schemas: from the document to shapes, and from shapes to an automaton."""
