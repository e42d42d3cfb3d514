//! `gpu-migrate-release`, see `--help`.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use gpu_migrate_release::{
    bundle,
    images::Source,
    notices::{self, Dependency},
};
use jiff::Timestamp;

/// Makes what a release consists of, from programs that are built already.
///
/// Run it in the checkout that they were built from. The same programs, Debian packages and values give the same bytes.
#[derive(Debug, Parser)]
#[command(version)]
struct Arguments {
    #[command(subcommand)]
    command: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Write the images of all components as OCI layouts (one tar each) and print their digests. No container daemon is needed.
    Images(SourceArgs),
    /// Write the whole release: images, command line, krew manifest, chart, install.yaml, bill of materials, notes, checksums.
    Bundle(SourceArgs),
}

#[derive(Debug, Args)]
struct SourceArgs {
    /// The folder with the programs, built for glibc: cargo build --profile dist --bins.
    #[arg(long, default_value = "target/dist")]
    programs: PathBuf,
    /// The folder to write to. An image is PROGRAM-TAG-ARCHITECTURE.tar.
    #[arg(long, default_value = "target/release-files")]
    out: PathBuf,
    /// The folder with the Debian packages of the root file system. Those that are missing are downloaded to it by apt-get.
    #[arg(long, default_value = "target/debian-packages")]
    packages: PathBuf,
    #[arg(long, default_value = "ghcr.io/gpu-migrate")]
    registry: String,
    /// The version, without a v.
    #[arg(long, default_value = env!("CARGO_PKG_VERSION"))]
    tag: String,
    /// The commit that the programs were built from (default: git's HEAD here).
    #[arg(long)]
    revision: Option<String>,
    /// The time of all files, in seconds since 1970 (default: that of git's HEAD here).
    #[arg(long, env = "SOURCE_DATE_EPOCH")]
    created: Option<i64>,
}

fn main() -> Result<()> {
    match Arguments::parse().command {
        Verb::Images(args) => {
            let (source, _, out) = args.source()?;
            write(&out, &images(&source)?)
        }
        Verb::Bundle(args) => {
            let (source, dependencies, out) = args.source()?;
            let images = images(&source)?;
            write(&out, &bundle::files(&source, Path::new("."), &dependencies, &images)?)?;
            write(&out, &images)
        }
    }
}

impl SourceArgs {
    fn source(self) -> Result<(Source, Vec<Dependency>, PathBuf)> {
        let Self { programs, out, packages, registry, tag, revision, created } = self;
        let revision = match revision {
            Some(revision) => revision,
            None => git(&["describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"])?,
        };
        let created = match created {
            Some(seconds) => seconds,
            None => git(&["log", "-1", "--format=%ct"])?.parse().context("not git's commit time")?,
        };
        let dependencies = notices::dependencies(Path::new("."))?;
        let (notices, created) = (notices::text(&dependencies)?, Timestamp::from_second(created)?);
        Ok((Source { programs, packages, registry, tag, revision, notices, created }, dependencies, out))
    }
}

/// The images by the name of their file; prints their digests.
fn images(source: &Source) -> Result<BTreeMap<String, Vec<u8>>> {
    let mut files = BTreeMap::new();
    for built in source.build()? {
        println!("{}  {}", built.layout.digest, built.name);
        let program = built.name.rsplit(['/', ':']).nth(1).unwrap_or(&built.name);
        files.insert(format!("{program}-{}-{}.tar", source.tag, built.architecture), built.layout.tar);
    }
    Ok(files)
}

fn write(folder: &Path, files: &BTreeMap<String, Vec<u8>>) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, content) in files {
        let path = folder.join(name);
        fs::write(&path, content).with_context(|| format!("cannot write {}", path.display()))?;
        println!("{}", path.display());
    }
    Ok(())
}

/// What git prints about this checkout.
fn git(arguments: &[&str]) -> Result<String> {
    let output = Command::new("git").args(arguments).output().context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git {} failed: {}; outside a checkout give --revision and --created",
        arguments.join(" "),
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8(output.stdout)?.trim().to_owned())
}
