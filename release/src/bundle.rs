//! All files of a release, apart from the images: the command line as an archive and as a plugin of kubectl, the packaged chart,
//! the manifests, the bill of materials, the notes, the provenance, and the checksums of all.

use std::{collections::BTreeMap, fmt::Write as _, fs, path::Path};

use anyhow::{Context, Result, ensure};

use crate::{
    debian,
    images::{Built, COMPONENTS, Source, architecture},
    notices::{Dependency, bill_of_materials},
    oci::{Entry, Layer, Tree, digest},
    provenance::Statement,
    signed::Files,
};

/// Where releases are downloaded from.
const DOWNLOADS: &str = "https://github.com/gpu-migrate/gpu-migrate/releases/download";

/// The checksums of all files, as `sha256sum --check` reads them.
pub const SUMS: &str = "SHA256SUMS";
/// What the release was made of, and by whom: a [`Statement`].
pub const PROVENANCE: &str = "provenance.json";

/// A release's files by name, the images given to it included. `builder` is a URI for who runs this and where.
///
/// # Errors
/// If a file of the checkout or the program `gpu-migrate` cannot be read, or the CHANGELOG says nothing about the version.
pub fn files(
    source: &Source,
    checkout: &Path,
    dependencies: &[Dependency],
    images: Vec<Built>,
    builder: &str,
) -> Result<Files> {
    let version = &source.tag;
    let program = read(&source.programs.join("gpu-migrate"))?;
    let architecture = architecture(&program).context("cannot use gpu-migrate")?;
    let text = |name: &str| {
        Ok::<_, anyhow::Error>(Entry::File { mode: 0o644, content: read(&checkout.join(name))? })
    };
    let archive = Layer::new(
        &Tree::from([
            ("gpu-migrate".into(), Entry::File { mode: 0o755, content: program }),
            ("LICENSE".into(), text("LICENSE")?),
            ("THIRD-PARTY".into(), Entry::File { mode: 0o644, content: source.notices.clone().into_bytes() }),
        ]),
        source.created,
    )?;
    let archive_name = format!("gpu-migrate-{version}-linux-{architecture}.tar.gz");
    let krew = krew(version, architecture, &archive_name, &sha256(archive.gzip()));
    let changes = String::from_utf8(read(&checkout.join("CHANGELOG.md"))?)?;
    let packages = debian::packages(&source.packages, architecture)?;
    let bill = bill_of_materials(version, source.created, dependencies, &packages);
    let mut files = BTreeMap::from([
        (format!("gpu-migrate-{version}.cdx.json"), format!("{bill:#}\n").into_bytes()),
        (archive_name, archive.gzip().to_vec()),
        ("gpu-migrate-krew.yaml".into(), krew.into_bytes()),
        (format!("gpu-migrate-{version}.tgz"), chart(checkout, source)?),
        ("install.yaml".into(), read(&checkout.join("deploy/install.yaml"))?),
        ("RELEASE_NOTES.md".into(), notes(&changes, version)?.into_bytes()),
    ]);
    let image_digests = images.iter().map(|image| (image.name.clone(), image.layout.digest.clone()));
    let subjects = image_digests.collect::<BTreeMap<_, _>>();
    files.extend(images.into_iter().map(|image| (image.file(), image.layout.tar)));
    let subjects = digests(&files).into_iter().chain(subjects).collect();
    let programs = COMPONENTS.map(|component| component.program.to_owned());
    let programs = programs.into_iter().map(|program| {
        let content = read(&source.programs.join(&program))?;
        Ok((program, digest(&content)))
    });
    let programs = programs.collect::<Result<_>>()?;
    let statement = Statement::new(source, builder, &subjects, &programs, &packages);
    files.insert(PROVENANCE.into(), format!("{}\n", serde_json::to_string_pretty(&statement)?).into_bytes());
    let mut sums = String::new();
    for (name, digest) in digests(&files) {
        let _ = writeln!(sums, "{}  {name}", digest.trim_start_matches("sha256:"));
    }
    files.insert(SUMS.into(), sums.into_bytes());
    Ok(files)
}

fn digests(files: &Files) -> BTreeMap<String, String> {
    files.iter().map(|(name, content)| (name.clone(), digest(content))).collect()
}

/// The chart as `helm package` makes it, and the same bytes each time.
///
/// # Errors
/// If it cannot be read, or is of another version than the release.
pub fn chart(checkout: &Path, source: &Source) -> Result<Vec<u8>> {
    let folder = checkout.join("deploy/chart/gpu-migrate");
    let description = String::from_utf8(read(&folder.join("Chart.yaml"))?)?;
    for field in ["version", "appVersion"] {
        let line = format!("{field}: {}", source.tag);
        ensure!(
            description.lines().any(|l| l == line),
            "deploy/chart/gpu-migrate/Chart.yaml does not say {line}"
        );
    }
    let mut tree = Tree::new();
    add(&mut tree, &folder, "gpu-migrate")?;
    Ok(Layer::new(&tree, source.created)?.gzip().to_vec())
}

fn add(tree: &mut Tree, folder: &Path, path: &str) -> Result<()> {
    for entry in fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))? {
        let entry = entry?;
        let path = format!("{path}/{}", entry.file_name().to_string_lossy());
        if entry.file_type()?.is_dir() {
            add(tree, &entry.path(), &path)?;
        } else {
            tree.insert(path, Entry::File { mode: 0o644, content: read(&entry.path())? });
        }
    }
    Ok(())
}

/// By the rules of <https://krew.sigs.k8s.io/docs/developer-guide/plugin-manifest/>: a version with a `v`, a licence in the archive.
fn krew(version: &str, architecture: &str, archive: &str, sha256: &str) -> String {
    format!(
        "apiVersion: krew.googlecontainertools.github.com/v1alpha2
kind: Plugin
metadata:
  name: gpu-migrate
spec:
  version: v{version}
  homepage: https://github.com/gpu-migrate/gpu-migrate
  shortDescription: Move projects from whole to shared GPUs
  description: |
    Plans, checks, rolls out and takes back the migration of projects from whole cards
    (nvidia.com/gpu) to shares of cards, on the same nodes, one project at a time.
  platforms:
    - selector:
        matchLabels: {{os: linux, arch: {architecture}}}
      uri: {DOWNLOADS}/v{version}/{archive}
      sha256: {sha256}
      bin: gpu-migrate
"
    )
}

/// What the CHANGELOG says about a version, or about what is not released yet where there is no such heading.
fn notes(changes: &str, version: &str) -> Result<String> {
    let section = |title: &str| {
        let (_, rest) = changes.split_once(&format!("\n## {title}"))?;
        let (_, body) = rest.split_once('\n')?;
        Some(body.split("\n## ").next().unwrap_or(body).trim().to_owned() + "\n")
    };
    section(version)
        .or_else(|| section("Unreleased"))
        .with_context(|| format!("CHANGELOG.md has neither a heading `## {version}` nor `## Unreleased`"))
}

fn sha256(content: &[u8]) -> String {
    digest(content).trim_start_matches("sha256:").to_owned()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    #[test]
    fn notes_are_those_of_the_version() {
        let changes =
            "# Changelog\n\n## Unreleased\n\n- next\n\n## 0.2.0 (2027)\n\n- this\n\n## 0.1.0\n\n- old\n";
        assert_eq!(super::notes(changes, "0.2.0").unwrap(), "- this\n");
        assert_eq!(super::notes(changes, "0.3.0").unwrap(), "- next\n");
        assert!(super::notes("# Changelog\n", "0.3.0").is_err());
    }
}
