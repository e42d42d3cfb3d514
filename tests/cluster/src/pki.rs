//! Certificates and kubeconfigs of one cluster: a new CA for each run.

use std::path::PathBuf;

use anyhow::Result;
use base64::{Engine, engine::general_purpose::STANDARD};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair,
    KeyUsagePurpose,
};
use serde_json::{Value, json};

use crate::layout::Layout;

/// The cluster's CA, and where its files go.
#[derive(Debug)]
pub struct Pki {
    layout: Layout,
    issuer: Issuer<'static, KeyPair>,
    ca_pem: String,
}

/// A certificate and its key, as files.
#[derive(Clone, Debug)]
pub struct CertFiles {
    pub cert: PathBuf,
    pub key: PathBuf,
}

impl Pki {
    /// Creates the CA and the service accounts' signing key.
    pub fn new(layout: &Layout) -> Result<Self> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, "gpu-migrate-cluster-tests");
        params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
        params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::DigitalSignature];
        let key = KeyPair::generate()?;
        let ca_pem = params.self_signed(&key)?.pem();
        layout.write("pki/ca.crt", &ca_pem)?;
        let accounts = KeyPair::generate()?;
        layout.write("pki/service-accounts.key", accounts.serialize_pem())?;
        layout.write("pki/service-accounts.pub", accounts.public_key_pem())?;
        Ok(Self { layout: layout.clone(), issuer: Issuer::new(params, key), ca_pem })
    }

    pub fn ca(&self) -> PathBuf {
        self.layout.file("pki/ca.crt")
    }

    /// The key that signs service account tokens.
    pub fn service_accounts_key(&self) -> PathBuf {
        self.layout.file("pki/service-accounts.key")
    }

    /// The key that checks service account tokens.
    pub fn service_accounts_public_key(&self) -> PathBuf {
        self.layout.file("pki/service-accounts.pub")
    }

    /// A serving certificate for loopback and some names.
    pub fn server(&self, name: &str, names: &[&str]) -> Result<CertFiles> {
        let sans: Vec<String> =
            names.iter().copied().chain(["127.0.0.1", "localhost"]).map(String::from).collect();
        let mut params = CertificateParams::new(sans)?;
        params.distinguished_name.push(DnType::CommonName, name);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth];
        let (cert, key) = self.sign(&params)?;
        Ok(CertFiles {
            cert: self.layout.write(&format!("pki/{name}.crt"), cert)?,
            key: self.layout.write(&format!("pki/{name}.key"), key)?,
        })
    }

    /// A client certificate for `user` of `group`.
    pub fn client(&self, user: &str, group: &str) -> Result<CertFiles> {
        let (cert, key) = self.sign_client(user, group)?;
        Ok(CertFiles {
            cert: self.layout.write(&format!("pki/{user}.crt"), cert)?,
            key: self.layout.write(&format!("pki/{user}.key"), key)?,
        })
    }

    fn sign_client(&self, user: &str, group: &str) -> Result<(String, String)> {
        let mut params = CertificateParams::new(Vec::<String>::new())?;
        params.distinguished_name.push(DnType::CommonName, user);
        params.distinguished_name.push(DnType::OrganizationName, group);
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ClientAuth];
        self.sign(&params)
    }

    /// A kubeconfig for `user` of `group`, with its client certificate inside.
    pub fn kubeconfig(&self, apiserver_port: u16, user: &str, group: &str) -> Result<PathBuf> {
        let (cert, key) = self.sign_client(user, group)?;
        let credentials = json!({
            "client-certificate-data": STANDARD.encode(cert),
            "client-key-data": STANDARD.encode(key),
        });
        self.kubeconfig_with(apiserver_port, &format!("{user}.{group}"), user, &credentials)
    }

    /// A kubeconfig for whoever has a token.
    pub fn kubeconfig_for_token(&self, apiserver_port: u16, name: &str, token: &str) -> Result<PathBuf> {
        self.kubeconfig_with(apiserver_port, name, name, &json!({"token": token}))
    }

    fn kubeconfig_with(
        &self,
        apiserver_port: u16,
        file: &str,
        user: &str,
        credentials: &Value,
    ) -> Result<PathBuf> {
        let config = json!({
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "it", "cluster": {
                "server": format!("https://127.0.0.1:{apiserver_port}"),
                "certificate-authority-data": STANDARD.encode(&self.ca_pem),
            }}],
            "users": [{"name": user, "user": credentials}],
            "contexts": [{"name": "it", "context": {"cluster": "it", "user": user}}],
            "current-context": "it",
        });
        self.layout.write(&format!("kubeconfig/{file}").replace(':', "-"), config.to_string())
    }

    fn sign(&self, params: &CertificateParams) -> Result<(String, String)> {
        let key = KeyPair::generate()?;
        let cert = params.signed_by(&key, &self.issuer)?;
        Ok((cert.pem(), key.serialize_pem()))
    }
}
