//! A real Kubernetes cluster on loopback, and the scenarios that run on it.
