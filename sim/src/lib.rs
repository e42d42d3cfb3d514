//! An embedded cluster for demo and fast tests, and trace replay for simulate.
