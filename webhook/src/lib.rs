//! Mutating admission webhook: rewrites whole-card requests into shares, per project.
