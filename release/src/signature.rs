//! Signatures by a key that is at hand as a file: ECDSA on P-256 over SHA-256, as `cosign verify-blob --key` and
//! `openssl dgst -sha256 -verify` check them, and the DSSE envelope around a signed document.

use anyhow::{Context, Result, ensure};
use aws_lc_rs::{
    encoding::AsDer,
    rand::SystemRandom,
    signature::{
        ECDSA_P256_SHA256_ASN1, ECDSA_P256_SHA256_ASN1_SIGNING, EcdsaKeyPair, KeyPair, UnparsedPublicKey,
    },
};
use base64::{Engine as _, engine::general_purpose::STANDARD as BASE64};
use serde::{Deserialize, Serialize};

/// Signs releases.
#[derive(Debug)]
pub struct PrivateKey(EcdsaKeyPair);

impl PrivateKey {
    /// From PKCS#8 in PEM, without a passphrase.
    ///
    /// # Errors
    /// If it is something else, or a key of another kind.
    pub fn from_pem(text: &[u8]) -> Result<Self> {
        let other = "openssl pkcs8 -topk8 -nocrypt -in KEY converts other forms";
        let der = block(text, "PRIVATE KEY").context(other)?;
        let key = EcdsaKeyPair::from_pkcs8(&ECDSA_P256_SHA256_ASN1_SIGNING, &der).map_err(|error| {
            anyhow::anyhow!("no private key for ECDSA on P-256 ({error}); make one: {MAKE_A_KEY}")
        })?;
        Ok(Self(key))
    }

    /// The other half, which verifies.
    ///
    /// # Errors
    /// If the library has no memory left for it.
    pub fn public(&self) -> Result<PublicKey> {
        let der = self.0.public_key().as_der().ok().context("cannot encode the public key")?;
        Ok(PublicKey(der.as_ref().to_vec()))
    }

    /// A signature in DER; another one each time.
    ///
    /// # Errors
    /// If there is no randomness.
    pub fn sign(&self, message: &[u8]) -> Result<Vec<u8>> {
        let signature = self.0.sign(&SystemRandom::new(), message).ok().context("cannot sign")?;
        Ok(signature.as_ref().to_vec())
    }
}

/// How a private key is made.
pub const MAKE_A_KEY: &str = "openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY";

/// Verifies what its private key has signed.
#[derive(Clone, Debug)]
pub struct PublicKey(Vec<u8>);

impl PublicKey {
    /// From a SubjectPublicKeyInfo in PEM.
    ///
    /// # Errors
    /// If it is something else, or a key of another kind.
    pub fn from_pem(text: &[u8]) -> Result<Self> {
        let der = block(text, "PUBLIC KEY")
            .context("openssl pkey -in KEY -pubout prints a private key's public key")?;
        let key = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &der);
        key.parse().map_err(|error| anyhow::anyhow!("no public key for ECDSA on P-256 ({error})"))?;
        Ok(Self(der))
    }

    /// Whether the message was signed by the private key.
    #[must_use]
    pub fn has_signed(&self, message: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, &self.0).verify(message, signature).is_ok()
    }
}

/// The content of the one block of a PEM file.
fn block(text: &[u8], tag: &str) -> Result<Vec<u8>> {
    let pem = pem::parse(text).with_context(|| format!("no PEM with a {tag}"))?;
    ensure!(pem.tag() == tag, "a PEM with a {}, not with a {tag}", pem.tag());
    Ok(pem.into_contents())
}

/// A document with signatures of it and of its type (<https://github.com/secure-systems-lab/dsse>).
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Envelope {
    payload_type: String,
    payload: String,
    signatures: Vec<Signature>,
}

#[derive(Clone, Debug, Deserialize, Serialize)]
struct Signature {
    /// A hint that nobody needs where there is one key.
    #[serde(default)]
    keyid: String,
    sig: String,
}

impl Envelope {
    /// # Errors
    /// As [`PrivateKey::sign`].
    pub fn sign(key: &PrivateKey, payload_type: &str, payload: &[u8]) -> Result<Self> {
        let sig = BASE64.encode(key.sign(&signed(payload_type, payload))?);
        Ok(Self {
            payload_type: payload_type.to_owned(),
            payload: BASE64.encode(payload),
            signatures: vec![Signature { keyid: String::new(), sig }],
        })
    }

    /// The payload, if it is of this type and one of the signatures is the key's.
    ///
    /// # Errors
    /// If not.
    pub fn open(&self, key: &PublicKey, payload_type: &str) -> Result<Vec<u8>> {
        let Self { payload_type: found, payload, signatures } = self;
        ensure!(found == payload_type, "its payload is of the type {found}, not {payload_type}");
        let payload = BASE64.decode(payload).context("its payload is no Base64")?;
        let message = signed(payload_type, &payload);
        let is_ours = |signature: &Signature| {
            BASE64.decode(&signature.sig).is_ok_and(|sig| key.has_signed(&message, &sig))
        };
        ensure!(
            signatures.iter().any(is_ours),
            "this key has not signed its payload: it was changed, or signed with another key"
        );
        Ok(payload)
    }
}

/// DSSE's pre-authentication encoding: what is signed.
fn signed(payload_type: &str, payload: &[u8]) -> Vec<u8> {
    let mut message = format!("DSSEv1 {} {payload_type} {} ", payload_type.len(), payload.len()).into_bytes();
    message.extend(payload);
    message
}

#[cfg(test)]
mod tests {
    /// The example of the specification.
    #[test]
    fn what_is_signed_is_encoded_as_specified() {
        assert_eq!(
            super::signed("http://example.com/HelloWorld", b"hello world"),
            b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
        );
    }
}
