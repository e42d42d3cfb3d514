//! A release as it is given away: the files of [`crate::bundle`] with signatures of their checksums and of their provenance.

use std::collections::BTreeMap;

use anyhow::{Context, Result, bail, ensure};

use crate::{
    bundle::{PROVENANCE, SUMS},
    oci::digest,
    provenance::{MEDIA_TYPE, Statement},
    signature::{Envelope, PrivateKey, PublicKey},
};

/// The signature of the checksums, in DER.
const SUMS_SIGNATURE: &str = "SHA256SUMS.sig";
/// The provenance in a signed envelope.
const SIGNED_PROVENANCE: &str = "provenance.intoto.jsonl";

/// The files of a folder by name.
pub type Files = BTreeMap<String, Vec<u8>>;

/// The signatures, as further files of the release.
///
/// # Errors
/// If the release is not whole, or its programs were not built from a commit.
pub fn sign(files: &Files, key: &PrivateKey) -> Result<Files> {
    let statement = check_sums(files)?;
    statement.commit().with_context(|| format!("{PROVENANCE} cannot be signed"))?;
    let envelope = Envelope::sign(key, MEDIA_TYPE, file(files, PROVENANCE)?)?;
    Ok(Files::from([
        (SUMS_SIGNATURE.to_owned(), key.sign(file(files, SUMS)?)?),
        (SIGNED_PROVENANCE.to_owned(), format!("{}\n", serde_json::to_string(&envelope)?).into_bytes()),
    ]))
}

/// What the provenance of a release says, whose files are all there, unchanged, and signed with the key.
///
/// # Errors
/// For the first of these that is not so.
pub fn verify(files: &Files, key: &PublicKey) -> Result<Statement> {
    ensure!(
        key.has_signed(file(files, SUMS)?, file(files, SUMS_SIGNATURE)?),
        "{SUMS_SIGNATURE}: this key has not signed {SUMS}: it was changed, or signed with another key"
    );
    let statement = check_sums(files)?;
    let payload = serde_json::from_slice::<Envelope>(file(files, SIGNED_PROVENANCE)?)
        .context("no DSSE envelope")
        .and_then(|envelope| envelope.open(key, MEDIA_TYPE))
        .with_context(|| SIGNED_PROVENANCE.to_owned())?;
    ensure!(
        payload == file(files, PROVENANCE)?,
        "{SIGNED_PROVENANCE} contains another statement than {PROVENANCE}: one of them is of another release"
    );
    Ok(statement)
}

/// The statement about the files, each of which is there as the checksums say.
fn check_sums(files: &Files) -> Result<Statement> {
    let mut sums = BTreeMap::new();
    for line in std::str::from_utf8(file(files, SUMS)?).with_context(|| SUMS.to_owned())?.lines() {
        let Some((sum, name)) = line.split_once("  ") else {
            bail!("{SUMS}: {line:?} is no checksum and name of a file")
        };
        sums.insert(name, sum);
    }
    for (name, content) in files {
        let actual = digest(content);
        match sums.get(name.as_str()) {
            Some(sum) => ensure!(
                actual.strip_prefix("sha256:") == Some(sum),
                "{name} was changed: {SUMS} says sha256:{sum}, it has {actual}; download it again"
            ),
            None => ensure!(
                [SUMS, SUMS_SIGNATURE, SIGNED_PROVENANCE].contains(&name.as_str()),
                "{name} is not in {SUMS}, so nobody has signed it; move it out of the folder"
            ),
        }
    }
    for name in sums.keys() {
        file(files, name)?;
    }
    let statement = Statement::from_json(file(files, PROVENANCE)?).with_context(|| PROVENANCE.to_owned())?;
    sums.remove(PROVENANCE);
    for (name, sum) in &sums {
        let stated = statement.files().get(name).copied();
        ensure!(stated == Some(sum), "{PROVENANCE} says {stated:?} of {name}, {SUMS} says {sum}");
    }
    if let Some(name) = statement.files().keys().find(|name| !sums.contains_key(*name)) {
        bail!("{PROVENANCE} is about {name}, which is not in {SUMS}");
    }
    Ok(statement)
}

fn file<'a>(files: &'a Files, name: &str) -> Result<&'a [u8]> {
    let hint = if [SUMS_SIGNATURE, SIGNED_PROVENANCE].contains(&name) {
        "it was not signed"
    } else {
        "it is not whole"
    };
    let content = files.get(name).with_context(|| format!("the release has no {name}: {hint}"))?;
    Ok(content)
}
