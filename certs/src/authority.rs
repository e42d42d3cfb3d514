//! A certificate authority and the leafs it signs: what is in them and when each is due. Pure; the time is handed in.
//!
//! Keys are ECDSA P-256. Every certificate is back-dated a little, so that a verifier whose clock is behind accepts it.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};

use crate::CertError;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lifetimes {
    /// Of a CA. Default one year. An extender wants ten: the scheduler reads its CA only once.
    pub ca: Duration,
    /// Of a serving certificate. Default seven days; never beyond its CA.
    pub leaf: Duration,
}

const HOUR: Duration = Duration::from_secs(3600);
const DAY: Duration = Duration::from_secs(24 * 3600);

impl Default for Lifetimes {
    fn default() -> Self {
        Self { ca: 365 * DAY, leaf: 7 * DAY }
    }
}

impl Lifetimes {
    /// How far before "now" a certificate of this lifetime begins: one hour for clocks that are behind, less for the
    /// very short-lived ones of tests.
    #[must_use]
    pub fn backdate(lifetime: Duration) -> Duration {
        HOUR.min(lifetime / 10)
    }

    /// How long a new CA is in the bundle before it signs: time for every verifier to read the bundle.
    #[must_use]
    pub fn settle(&self) -> Duration {
        (HOUR / 6).min(self.ca / 10)
    }

    /// How often to look at the clock: once a minute, more often only for very short-lived certificates.
    #[must_use]
    pub fn check_every(&self) -> Duration {
        (self.leaf.min(self.ca) / 40).clamp(Duration::from_millis(100), Duration::from_secs(60))
    }
}

/// From when to when a certificate is valid, whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Validity {
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl Validity {
    fn from_now(now: Timestamp, lifetime: Duration) -> Self {
        let seconds = |t: Timestamp| Timestamp::from_second(t.as_second()).unwrap_or(t);
        Self {
            not_before: seconds(now.checked_sub(Lifetimes::backdate(lifetime)).unwrap_or(Timestamp::MIN)),
            not_after: seconds(now.checked_add(lifetime).unwrap_or(Timestamp::MAX)),
        }
    }

    /// Reads it from a certificate.
    ///
    /// # Errors
    /// The text to put into [`CertError::Unusable`], when it is no X.509 certificate.
    pub fn of(certificate: &CertificateDer<'_>) -> Result<Self, String> {
        let (_, parsed) = x509_parser::parse_x509_certificate(certificate).map_err(|e| e.to_string())?;
        let at =
            |t: x509_parser::time::ASN1Time| Timestamp::from_second(t.timestamp()).map_err(|e| e.to_string());
        Ok(Self {
            not_before: at(parsed.validity().not_before)?,
            not_after: at(parsed.validity().not_after)?,
        })
    }

    /// Whether `now` lies in it.
    #[must_use]
    pub fn contains(&self, now: Timestamp) -> bool {
        self.not_before <= now && now <= self.not_after
    }

    /// Two thirds through: when to renew.
    #[must_use]
    pub fn renew_at(&self) -> Timestamp {
        let life = self.not_after.duration_since(self.not_before);
        self.not_before.checked_add(life / 3 * 2).unwrap_or(self.not_after)
    }

    /// Whether it is time to replace it: past two thirds, or not valid at all (a clock that was set).
    #[must_use]
    pub fn due(&self, now: Timestamp) -> bool {
        !self.contains(now) || now >= self.renew_at()
    }

    /// Whether it began that long ago.
    #[must_use]
    pub fn is_older(&self, than: Duration, now: Timestamp) -> bool {
        now.duration_since(self.not_before) >= than.try_into().unwrap_or(SignedDuration::MAX)
    }
}

/// A CA with its key: able to sign.
pub struct Ca {
    certificate: CertificateDer<'static>,
    pem: String,
    key: KeyPair,
    validity: Validity,
}

/// A serving certificate with its key.
pub struct Leaf {
    pub certificate: CertificateDer<'static>,
    /// Its key, PKCS#8.
    pub key: PrivateKeyDer<'static>,
    pub validity: Validity,
}

impl std::fmt::Debug for Ca {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ca").field("validity", &self.validity).finish_non_exhaustive()
    }
}

impl std::fmt::Debug for Leaf {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Leaf").field("validity", &self.validity).finish_non_exhaustive()
    }
}

impl Ca {
    /// A new self-signed CA. Its name carries the time, so that two CAs in one bundle are told apart by name.
    ///
    /// # Errors
    /// [`CertError::Generate`] when the key or certificate cannot be made.
    pub fn generate(owner: &str, now: Timestamp, lifetimes: &Lifetimes) -> Result<Self, CertError> {
        let name = format!("{owner} CA {now:.0}");
        let failed = |source| CertError::Generate { subject: name.clone(), source };
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let validity = Validity::from_now(now, lifetimes.ca);
        let mut params = params(&name, validity);
        params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
        params.key_usages =
            vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign, KeyUsagePurpose::DigitalSignature];
        let certificate = params.self_signed(&key).map_err(failed)?;
        Ok(Self { pem: certificate.pem(), certificate: certificate.der().clone(), key, validity })
    }

    /// A CA from PEM texts; `origin` names the Secret or file in errors.
    ///
    /// # Errors
    /// [`CertError::Unusable`] when a text does not parse or the key is not the certificate's.
    pub fn from_pem(origin: &str, what: &str, certificate: &str, key: &str) -> Result<Self, CertError> {
        let unusable = |why: String| CertError::Unusable { origin: origin.into(), what: what.into(), why };
        let der = CertificateDer::from_pem_slice(certificate.as_bytes())
            .map_err(|e| unusable(format!("{e}; expected a PEM certificate")))?;
        let key = KeyPair::from_pem(key)
            .map_err(|e| unusable(format!("its key: {e}; expected a PKCS#8 PEM key")))?;
        let validity = Validity::of(&der).map_err(unusable)?;
        let (_, parsed) = x509_parser::parse_x509_certificate(&der).map_err(|e| unusable(e.to_string()))?;
        if parsed.public_key().subject_public_key.data.as_ref() != key.public_key_raw() {
            return Err(unusable("the private key does not belong to the certificate".into()));
        }
        Ok(Self { pem: certificate.to_owned(), certificate: der, key, validity })
    }

    /// Signs a serving certificate for `names` (DNS names and IP addresses). It never outlives the CA.
    ///
    /// # Errors
    /// [`CertError::Name`] for a name that no certificate can carry, [`CertError::Generate`] otherwise.
    pub fn issue(&self, names: &[String], now: Timestamp, lifetimes: &Lifetimes) -> Result<Leaf, CertError> {
        let subject = names.first().map_or("", String::as_str);
        let failed = |source| CertError::Generate { subject: subject.into(), source };
        let mut validity = Validity::from_now(now, lifetimes.leaf);
        validity.not_after = validity.not_after.min(self.validity.not_after);
        let mut params = params(subject, validity);
        params.subject_alt_names = subject_alt_names(names)?;
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        params.use_authority_key_identifier_extension = true;
        let issuer = Issuer::from_ca_cert_der(&self.certificate, &self.key).map_err(failed)?;
        let key = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(failed)?;
        let certificate = params.signed_by(&key, &issuer).map_err(failed)?;
        let der = PrivateKeyDer::Pkcs8(key.serialize_der().into());
        Ok(Leaf { certificate: certificate.der().clone(), key: der, validity })
    }

    #[must_use]
    pub fn pem(&self) -> &str {
        &self.pem
    }

    #[must_use]
    pub fn der(&self) -> &CertificateDer<'static> {
        &self.certificate
    }

    /// The key as PKCS#8 PEM.
    #[must_use]
    pub fn key_pem(&self) -> String {
        self.key.serialize_pem()
    }

    #[must_use]
    pub fn validity(&self) -> Validity {
        self.validity
    }
}

fn params(common_name: &str, validity: Validity) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = rcgen::DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, "gpu-migrate");
    // X.520: a common name is at most 64 characters.
    params.distinguished_name.push(DnType::CommonName, common_name.chars().take(64).collect::<String>());
    params.not_before = std::time::SystemTime::from(validity.not_before).into();
    params.not_after = std::time::SystemTime::from(validity.not_after).into();
    params
}

fn subject_alt_names(names: &[String]) -> Result<Vec<rcgen::SanType>, CertError> {
    names
        .iter()
        .map(|name| match name.parse() {
            Ok(address) => Ok(rcgen::SanType::IpAddress(address)),
            Err(_) => rustls_pki_types::DnsName::try_from(name.as_str())
                .ok()
                .and_then(|_| name.as_str().try_into().ok())
                .map(rcgen::SanType::DnsName)
                .ok_or_else(|| CertError::Name { name: name.clone() }),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: i64) -> Timestamp {
        Timestamp::from_second(1_800_000_000 + seconds).unwrap()
    }

    const SHORT: Lifetimes = Lifetimes { ca: Duration::from_secs(3000), leaf: Duration::from_secs(300) };

    fn ca() -> Ca {
        Ca::generate("test", at(0), &SHORT).unwrap()
    }

    #[test]
    fn default_lifetimes_are_a_year_and_a_week_checked_every_minute() {
        let default = Lifetimes::default();
        assert_eq!(default.check_every(), Duration::from_secs(60));
        assert_eq!(Lifetimes::backdate(default.leaf), HOUR);
        assert_eq!(default.settle(), Duration::from_secs(600));
    }

    #[test]
    fn a_leaf_is_due_at_two_thirds_and_when_the_clock_says_it_is_not_valid() {
        let leaf = ca().issue(&["a.b.svc".into()], at(0), &SHORT).unwrap();
        assert_eq!(leaf.validity, Validity { not_before: at(-30), not_after: at(300) });
        assert_eq!(leaf.validity.renew_at(), at(190));
        for (now, due) in [(-31, true), (-30, false), (0, false), (189, false), (190, true), (301, true)] {
            assert_eq!(leaf.validity.due(at(now)), due, "at {now}");
        }
    }

    #[test]
    fn a_leaf_never_outlives_its_ca() {
        let leaf = ca().issue(&["a".into()], at(2900), &SHORT).unwrap();
        assert_eq!(leaf.validity.not_after, at(3000));
        assert_eq!(Validity::of(&leaf.certificate).unwrap(), leaf.validity);
    }

    #[test]
    fn a_leaf_is_accepted_by_a_verifier_that_knows_the_ca() {
        let ca = ca();
        let leaf = ca.issue(&["w.gpu.svc".into(), "127.0.0.1".into(), "::1".into()], at(0), &SHORT).unwrap();
        let anchors = [webpki_anchor(&ca)];
        let verify = |name: &str, now: i64| {
            let certificate = rustls::server::ParsedCertificate::try_from(&leaf.certificate).unwrap();
            let name = rustls_pki_types::ServerName::try_from(name.to_owned()).unwrap();
            let time =
                rustls_pki_types::UnixTime::since_unix_epoch(Duration::from_secs(at(now).as_second() as u64));
            let mut roots = rustls::RootCertStore::empty();
            roots.extend(anchors.iter().cloned());
            let algorithms =
                rustls::crypto::aws_lc_rs::default_provider().signature_verification_algorithms.all;
            rustls::client::verify_server_cert_signed_by_trust_anchor(
                &certificate,
                &roots,
                &[],
                time,
                algorithms,
            )
            .and_then(|()| rustls::client::verify_server_name(&certificate, &name))
        };
        for name in ["w.gpu.svc", "127.0.0.1", "::1"] {
            verify(name, 0).unwrap();
        }
        verify("w.gpu.svc", -25).unwrap();
        assert!(verify("other.gpu.svc", 0).is_err());
        assert!(verify("w.gpu.svc", 301).is_err());
    }

    fn webpki_anchor(ca: &Ca) -> rustls_pki_types::TrustAnchor<'static> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(ca.der().clone()).unwrap();
        roots.roots.remove(0)
    }

    #[test]
    fn a_ca_reads_back_and_signs() {
        let ca = ca();
        let back = Ca::from_pem("secret x/y", "tls.crt", ca.pem(), &ca.key_pem()).unwrap();
        assert_eq!(back.der(), ca.der());
        assert_eq!(back.validity(), ca.validity());
        assert!(back.issue(&["a".into()], at(0), &SHORT).is_ok());
    }

    #[test]
    fn what_is_broken_is_named() {
        let (ca, other) = (ca(), Ca::generate("other", at(0), &SHORT).unwrap());
        let cases = [
            (ca.pem(), other.key_pem(), "does not belong"),
            ("nonsense", ca.key_pem(), "expected a PEM certificate"),
            (ca.pem(), "nonsense".to_owned(), "expected a PKCS#8 PEM key"),
        ];
        for (certificate, key, expected) in cases {
            let error = Ca::from_pem("secret x/y", "tls.crt", certificate, &key).unwrap_err().to_string();
            assert!(error.starts_with("secret x/y: tls.crt") && error.contains(expected), "{error}");
        }
        let error = ca.issue(&["a b".into()], at(0), &SHORT).unwrap_err().to_string();
        assert!(error.contains("\"a b\"") && error.contains("expected a DNS name"), "{error}");
    }
}
