//! Where a release comes from: a statement (in-toto Statement v1) about its files and images, with what they were made of
//! (SLSA provenance v1, <https://slsa.dev/spec/v1.1/provenance>).
//!
//! It has no time of its own, so that the same input gives the same bytes.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{debian::Package, images::Source};

const STATEMENT: &str = "https://in-toto.io/Statement/v1";
const PROVENANCE: &str = "https://slsa.dev/provenance/v1";
/// A statement's media type.
pub const MEDIA_TYPE: &str = "application/vnd.in-toto+json";

/// The source of the programs.
const REPOSITORY: &str = "https://github.com/gpu-migrate/gpu-migrate";

/// What is stated about which files and images.
#[derive(Clone, Debug, Deserialize, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Statement {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    predicate_type: String,
    predicate: Value,
}

/// A file, or by `registry/name:tag` an image, with the hex digits of its SHA-256.
#[derive(Clone, Debug, Deserialize, Serialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

impl Subject {
    fn sha256(&self) -> &str {
        self.digest.get("sha256").map_or("", String::as_str)
    }
}

impl Statement {
    /// Subjects and programs are digests (`sha256:…`) by name. `builder` is a URI for who ran the command and where.
    #[must_use]
    pub fn new(
        source: &Source,
        builder: &str,
        subjects: &BTreeMap<String, String>,
        programs: &BTreeMap<String, String>,
        packages: &[Package],
    ) -> Self {
        let sha256 = |digest: &str| digest.trim_start_matches("sha256:").to_owned();
        let commit = json!({"uri": format!("git+{REPOSITORY}"), "digest": {"gitCommit": source.revision}});
        let programs =
            programs.iter().map(|(name, digest)| json!({"name": name, "digest": {"sha256": sha256(digest)}}));
        let packages = packages
            .iter()
            .map(|package| json!({"uri": package.purl(), "digest": {"sha256": sha256(&package.digest)}}));
        let inputs: Vec<Value> = [commit].into_iter().chain(programs).chain(packages).collect();
        Self {
            kind: STATEMENT.to_owned(),
            subject: subjects
                .iter()
                .map(|(name, digest)| Subject {
                    name: name.clone(),
                    digest: BTreeMap::from([("sha256".to_owned(), sha256(digest))]),
                })
                .collect(),
            predicate_type: PROVENANCE.to_owned(),
            predicate: json!({
                "buildDefinition": {
                    "buildType": format!("{REPOSITORY}/blob/v{}/deploy/README.md#images-and-releases", source.tag),
                    "externalParameters": {
                        "tag": source.tag,
                        "registry": source.registry,
                        "created": source.created.to_string(),
                    },
                    "resolvedDependencies": inputs,
                },
                "runDetails": {"builder": {"id": builder}},
            }),
        }
    }

    /// # Errors
    /// If it is no statement, or one about something else.
    pub fn from_json(text: &[u8]) -> Result<Self> {
        let statement: Self = serde_json::from_slice(text).context("no in-toto statement")?;
        let Self { kind, predicate_type, .. } = &statement;
        ensure!(kind == STATEMENT, "_type is {kind}, not {STATEMENT}");
        ensure!(predicate_type == PROVENANCE, "predicateType is {predicate_type}, not {PROVENANCE}");
        Ok(statement)
    }

    /// The hex digits of each file's SHA-256. Names of files have no slash, those of images do.
    #[must_use]
    pub fn files(&self) -> BTreeMap<&str, &str> {
        let files = self.subject.iter().filter(|subject| !subject.name.contains('/'));
        files.map(|subject| (subject.name.as_str(), subject.sha256())).collect()
    }

    /// The images as `registry/name:tag@sha256:…`.
    pub fn images(&self) -> impl Iterator<Item = String> {
        let images = self.subject.iter().filter(|subject| subject.name.contains('/'));
        images.map(|subject| format!("{}@sha256:{}", subject.name, subject.sha256()))
    }

    /// The commit that the programs were built from.
    ///
    /// # Errors
    /// If it names none: another text, or files that were not committed.
    pub fn commit(&self) -> Result<&str> {
        let commit = self.text("/buildDefinition/resolvedDependencies/0/digest/gitCommit");
        ensure!(
            matches!(commit.len(), 40 | 64) && commit.bytes().all(|byte| byte.is_ascii_hexdigit()),
            "its programs were built from {commit:?}, which is no commit; make the release in a checkout without changes"
        );
        Ok(commit)
    }

    /// Who made the release.
    #[must_use]
    pub fn builder(&self) -> &str {
        self.text("/runDetails/builder/id")
    }

    fn text(&self, pointer: &str) -> &str {
        self.predicate.pointer(pointer).and_then(Value::as_str).unwrap_or_default()
    }
}
