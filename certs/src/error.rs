//! What can go wrong with certificates, said so that the reader knows which object to look at.

use std::path::PathBuf;

#[derive(Debug, thiserror::Error)]
pub enum CertError {
    /// A certificate or key could not be made.
    #[error("cannot make a certificate for {subject}: {source}")]
    Generate { subject: String, source: rcgen::Error },
    /// A certificate or key that was read cannot be used.
    #[error("{origin}: {what} cannot be used: {why}")]
    Unusable {
        origin: String,
        what: String,
        /// Why not, and what was expected.
        why: String,
    },
    /// A file could not be read or written.
    #[error("{}: {source}", path.display())]
    File { path: PathBuf, source: std::io::Error },
    /// The API server refused or could not be reached.
    #[error("{object}: {source}")]
    Api { object: String, source: Box<kube::Error> },
    /// A certificate made by such a clock would not be valid yet, or too soon no more, for everybody else.
    #[error(
        "this machine's clock says {now} and the API server's {server}: no certificate is made until they agree; correct the clock"
    )]
    Clock { now: jiff::Timestamp, server: jiff::Timestamp },
    #[error("TLS configuration: {0}")]
    Tls(String),
    /// The name of a server is neither a DNS name nor an IP address.
    #[error("{name:?} is not a name a certificate can carry: expected a DNS name or an IP address")]
    Name { name: String },
    /// Others kept changing the object under us.
    #[error("{object}: changed by another client {attempts} times in a row between reading and writing it")]
    Contended { object: String, attempts: u32 },
}

impl CertError {
    pub(crate) fn api(object: impl Into<String>, source: kube::Error) -> Self {
        Self::Api { object: object.into(), source: Box::new(source) }
    }

    pub(crate) fn file(path: &std::path::Path, source: std::io::Error) -> Self {
        Self::File { path: path.to_owned(), source }
    }
}
