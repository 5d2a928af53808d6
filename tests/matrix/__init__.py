"""The matrix: every feature on every axis for several kinds of models, right or refused by name.

axes.py      meshes and options: the columns
kinds.py     small models and their batches
features/    what users do, each as one function that runs alone and on a mesh: the rows
loops.py     the loop that most rows change, so that several of them meet in one
pairs.py     cells in which every two of these rows meet
record.py    what came of them, in docs/matrix.md
sides.py     the verbs that features are written in, for one process and for ranks of a mesh
cells.py     one cell: the feature alone, the feature on the mesh, and the comparison
verdicts.py  the golden table: what each cell was when it was last recorded
shrink.py    a failing cell made small, and a script that shows it
faults.py    seeded faults of the package, which the matrix must find

python -m tests.matrix run clip llama dp-zero1      # one cell
python -m tests.matrix pass                         # all of them, recorded; goes on where it stopped
python -m tests.matrix pairs                        # every two rows that meet; goes on where it stopped
"""
