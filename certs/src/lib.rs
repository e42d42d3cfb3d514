//! Certificates for the webhook and the extender: CA, leafs, rotation, hot reload, caBundle.
