//! Who may connect: optional verification of the client's certificate, by CA and by name.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use rustls::client::danger::HandshakeSignatureValid;
use rustls::crypto::CryptoProvider;
use rustls::server::WebPkiClientVerifier;
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::{DigitallySignedStruct, DistinguishedName, RootCertStore, SignatureScheme};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, UnixTime};

use crate::CertError;

/// Demand a certificate of every client.
#[derive(Clone, Debug)]
pub struct ClientAuth {
    /// PEM file with the CAs that may have signed it.
    pub ca_file: PathBuf,
    /// Common names or DNS names that may connect; empty for any that the CA has signed.
    pub names: Vec<String>,
}

impl ClientAuth {
    /// Builds the verifier. The CA file is read now, and again when it has changed.
    pub(crate) fn verifier(
        &self,
        provider: &Arc<CryptoProvider>,
    ) -> Result<Arc<dyn ClientCertVerifier>, CertError> {
        let state = FileState::of(&self.ca_file);
        let inner = self.read(provider)?;
        let current = Mutex::new((state, inner));
        Ok(Arc::new(Reloading { auth: self.clone(), provider: Arc::clone(provider), current }))
    }

    fn read(&self, provider: &Arc<CryptoProvider>) -> Result<Arc<dyn ClientCertVerifier>, CertError> {
        let origin = self.ca_file.display().to_string();
        let unusable =
            |why: String| CertError::Unusable { origin: origin.clone(), what: "client CA".into(), why };
        let pem = std::fs::read(&self.ca_file).map_err(|e| CertError::file(&self.ca_file, e))?;
        let mut roots = RootCertStore::empty();
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|e| unusable(e.to_string()))?;
            roots.add(certificate).map_err(|e| unusable(e.to_string()))?;
        }
        if roots.is_empty() {
            return Err(unusable("expected at least one PEM certificate, found none".into()));
        }
        let inner = WebPkiClientVerifier::builder_with_provider(Arc::new(roots), Arc::clone(provider))
            .build()
            .map_err(|e| unusable(e.to_string()))?;
        Ok(if self.names.is_empty() { inner } else { Arc::new(Named { inner, names: self.names.clone() }) })
    }
}

/// By what a changed file is told; a Secret mount changes by another file in its place.
#[derive(Debug, PartialEq, Eq)]
struct FileState(Option<(u64, i64, i64)>);

impl FileState {
    fn of(path: &Path) -> Self {
        use std::os::unix::fs::MetadataExt;
        Self(std::fs::metadata(path).ok().map(|file| (file.ino(), file.mtime(), file.mtime_nsec())))
    }
}

/// Verifies by the CAs that are in the file at each handshake. A file that cannot be used changes nothing.
#[derive(Debug)]
struct Reloading {
    auth: ClientAuth,
    provider: Arc<CryptoProvider>,
    current: Mutex<(FileState, Arc<dyn ClientCertVerifier>)>,
}

impl Reloading {
    fn current(&self) -> Arc<dyn ClientCertVerifier> {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        let state = FileState::of(&self.auth.ca_file);
        if state != current.0 {
            match self.auth.read(&self.provider) {
                Ok(verifier) => {
                    tracing::info!(file = %self.auth.ca_file.display(), "client CAs read again");
                    current.1 = verifier;
                }
                Err(error) => tracing::warn!(%error, "client CAs not read again; those before stay in use"),
            }
            current.0 = state;
        }
        Arc::clone(&current.1)
    }
}

impl ClientCertVerifier for Reloading {
    /// None: they could not be exchanged. A client with one certificate needs no hint.
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        self.current().verify_client_cert(end_entity, intermediates, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.current().verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.current().verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

/// Adds a check of the name to a verifier.
#[derive(Debug)]
struct Named {
    inner: Arc<dyn ClientCertVerifier>,
    names: Vec<String>,
}

fn names_of(certificate: &CertificateDer<'_>) -> Vec<String> {
    use x509_parser::extensions::GeneralName;
    let Ok((_, parsed)) = x509_parser::parse_x509_certificate(certificate) else { return Vec::new() };
    let common = parsed.subject().iter_common_name().filter_map(|name| name.as_str().ok());
    let mut names: Vec<String> = common.map(str::to_owned).collect();
    if let Ok(Some(alternative)) = parsed.subject_alternative_name() {
        names.extend(alternative.value.general_names.iter().filter_map(|name| match name {
            GeneralName::DNSName(name) => Some((*name).to_owned()),
            _ => None,
        }));
    }
    names
}

impl ClientCertVerifier for Named {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, rustls::Error> {
        let verified = self.inner.verify_client_cert(end_entity, intermediates, now)?;
        let names = names_of(end_entity);
        if names.iter().any(|name| self.names.contains(name)) {
            return Ok(verified);
        }
        tracing::warn!(?names, allowed = ?self.names, "client certificate refused: none of its names may connect");
        Err(rustls::CertificateError::ApplicationVerificationFailure.into())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.inner.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}
