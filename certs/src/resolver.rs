//! The certificate in use, exchangeable while handshakes go on.

use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

use arc_swap::ArcSwapOption;
use rustls::crypto::CryptoProvider;
use rustls::server::{ClientHello, ResolvesServerCert};
use rustls::sign::CertifiedKey;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::CertError;
use crate::authority::Validity;

/// Hands the current certificate to each handshake. Without one, handshakes fail.
#[derive(Debug, Default)]
pub(crate) struct Resolver {
    current: ArcSwapOption<CertifiedKey>,
    /// Seconds since 1970; 0 while there is none.
    expires: AtomicI64,
}

impl Resolver {
    /// Puts a certificate into use from the next handshake on.
    pub(crate) fn set(
        &self,
        origin: &str,
        chain: Vec<CertificateDer<'static>>,
        key: PrivateKeyDer<'static>,
        validity: Validity,
    ) -> Result<(), CertError> {
        let unusable = |why: String| CertError::Unusable {
            origin: origin.into(),
            what: "serving certificate".into(),
            why,
        };
        let provider = CryptoProvider::get_default()
            .cloned()
            .unwrap_or_else(|| Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
        let key = provider.key_provider.load_private_key(key).map_err(|e| unusable(e.to_string()))?;
        let certified = CertifiedKey::new(chain, key);
        certified
            .keys_match()
            .map_err(|e| unusable(format!("certificate and key do not belong together ({e})")))?;
        self.current.store(Some(Arc::new(certified)));
        self.expires.store(validity.not_after.as_second(), Ordering::Relaxed);
        Ok(())
    }

    pub(crate) fn certificate(&self) -> Option<CertificateDer<'static>> {
        self.current.load().as_ref().and_then(|key| key.cert.first().cloned())
    }

    /// When the certificate expires, seconds since 1970.
    pub(crate) fn expires(&self) -> Option<i64> {
        Some(self.expires.load(Ordering::Relaxed)).filter(|seconds| *seconds != 0)
    }
}

impl ResolvesServerCert for Resolver {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        self.current.load_full()
    }
}
