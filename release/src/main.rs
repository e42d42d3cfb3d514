//! `gpu-migrate-release`, see `--help`.

use std::{
    fs, io,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, ensure};
use clap::{Args, Parser, Subcommand};
use gpu_migrate_release::{
    bundle,
    images::{Built, Source},
    notices::{self, Dependency},
    signature::{PrivateKey, PublicKey},
    signed::{self, Files},
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
    /// Write the whole release: images, command line, krew manifest, chart, install.yaml, bill of materials, notes, provenance,
    /// checksums.
    Bundle {
        #[command(flatten)]
        source: SourceArgs,
        /// Who runs this and where, for the provenance: a URI, such as that of a workflow at a tag.
        #[arg(
            long,
            default_value = "https://github.com/gpu-migrate/gpu-migrate/blob/main/deploy/README.md#by-hand"
        )]
        builder: String,
    },
    /// Sign a release: write SHA256SUMS.sig and provenance.intoto.jsonl beside its files.
    Sign {
        #[command(flatten)]
        release: ReleaseArgs,
        /// The private key for ECDSA on P-256, as PEM without a passphrase (PKCS#8):
        /// openssl genpkey -algorithm EC -pkeyopt ec_paramgen_curve:P-256 -out KEY. /dev/stdin keeps it off the disk.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
    },
    /// Check a release: whether all its files are there, unchanged and signed, and that its provenance is about them. Prints where they
    /// come from.
    Verify {
        #[command(flatten)]
        release: ReleaseArgs,
        /// The public key that releases are verified with, as PEM; of another source than the release itself.
        #[arg(long, value_name = "FILE")]
        key: PathBuf,
        /// Refuse a release of another commit than this one.
        #[arg(long, value_name = "COMMIT")]
        revision: Option<String>,
    },
}

#[derive(Debug, Args)]
struct ReleaseArgs {
    /// The folder with all files of one release and nothing else.
    #[arg(long, default_value = "target/release-files")]
    folder: PathBuf,
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
            let images = images(&source)?;
            write(&out, &images.into_iter().map(|image| (image.file(), image.layout.tar)).collect())
        }
        Verb::Bundle { source, builder } => {
            let (source, dependencies, out) = source.source()?;
            let images = images(&source)?;
            write(&out, &bundle::files(&source, Path::new("."), &dependencies, images, &builder)?)
        }
        Verb::Sign { release, key } => {
            let private = PrivateKey::from_pem(&read(&key)?).with_context(|| key.display().to_string())?;
            write(&release.folder, &signed::sign(&release.files()?, &private)?)
        }
        Verb::Verify { release, key, revision } => {
            let public = PublicKey::from_pem(&read(&key)?).with_context(|| key.display().to_string())?;
            let statement = signed::verify(&release.files()?, &public)
                .with_context(|| format!("{} is not to be trusted", release.folder.display()))?;
            let commit = statement.commit()?;
            if let Some(expected) = revision {
                ensure!(commit == expected, "the release is of commit {commit}, not {expected}");
            }
            println!("{} files, signed and unchanged", statement.files().len());
            println!("built from commit {commit} by {}", statement.builder());
            statement.images().for_each(|image| println!("{image}"));
            Ok(())
        }
    }
}

impl ReleaseArgs {
    fn files(&self) -> Result<Files> {
        let Self { folder } = self;
        let entries = fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
        let file = |entry: io::Result<fs::DirEntry>| {
            let path = entry?.path();
            let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            Ok((name, read(&path)?))
        };
        entries.map(file).collect()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| format!("cannot read {}", path.display()))
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

/// Builds the images and prints their digests.
fn images(source: &Source) -> Result<Vec<Built>> {
    let images = source.build()?;
    for built in &images {
        println!("{}  {}", built.layout.digest, built.name);
    }
    Ok(images)
}

fn write(folder: &Path, files: &Files) -> Result<()> {
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
