//! Which images there are: one for each component, of two layers. The lower one, [`debian`], is the same in all.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context, Result, bail, ensure};
use jiff::Timestamp;

use crate::{
    debian,
    oci::{Entry, Image, Layer, Layout, Tree},
};

/// A component that runs in the cluster.
#[derive(Clone, Copy, Debug)]
pub struct Component {
    /// The program, which is also the image's name and its entrypoint.
    pub program: &'static str,
    pub description: &'static str,
    /// The user that it runs as where the pod names none.
    pub user: &'static str,
}

/// All of them.
pub const COMPONENTS: [Component; 5] = [
    Component {
        program: "gpu-migrate-webhook",
        description: "Converts whole-card pods to shared pods at admission",
        user: "65532:65532",
    },
    Component {
        program: "gpu-migrate-extender",
        description: "Scheduler extender that chooses cards for legacy and shared pods",
        user: "65532:65532",
    },
    Component {
        program: "gpu-migrate-operator",
        description: "Rolls projects out in waves and runs the node components",
        user: "65532:65532",
    },
    Component {
        program: "gpu-migrate-bridge",
        description: "Node agent: device plugins for whole and shared cards",
        // The kubelet's directories are root's.
        user: "0:0",
    },
    Component {
        program: "gpu-migrate",
        description: "Command line: whether an installation works, and what is in the way of removing it",
        user: "65532:65532",
    },
];

/// What images are built from.
#[derive(Clone, Debug)]
pub struct Source {
    /// The folder with the programs of [`COMPONENTS`], built for glibc and stripped.
    pub programs: PathBuf,
    /// The folder with Debian packages, see [`debian::root`].
    pub packages: PathBuf,
    pub registry: String,
    pub tag: String,
    /// The commit that the programs were built from.
    pub revision: String,
    /// The licences of others in the programs, see [`crate::notices`].
    pub notices: String,
    /// The time of all files, and when the images say that they were made.
    pub created: Timestamp,
}

/// An image in memory.
#[derive(Clone, Debug)]
pub struct Built {
    /// `registry/program:tag`.
    pub name: String,
    /// Of the programs, by Go's name.
    pub architecture: &'static str,
    pub layout: Layout,
}

impl Built {
    /// The name of its file in a release.
    #[must_use]
    pub fn file(&self) -> String {
        let name = self.name.rsplit('/').next().unwrap_or(&self.name);
        format!("{}-{}.tar", name.replace(':', "-"), self.architecture)
    }
}

impl Source {
    /// Builds all images. The same programs, packages and values give the same bytes.
    ///
    /// # Errors
    /// If a program is missing or is of another architecture than the others, or [`debian::root`] fails.
    pub fn build(&self) -> Result<Vec<Built>> {
        let programs: Vec<(Component, Vec<u8>)> = COMPONENTS
            .into_iter()
            .map(|component| Ok((component, read(&self.programs.join(component.program))?)))
            .collect::<Result<_>>()?;
        let architecture = architecture_of_all(&programs)?;
        let root = debian::root(&self.packages, architecture, self.created)?;
        let build = |(component, program): (Component, Vec<u8>)| {
            let name = format!("{}/{}:{}", self.registry, component.program, self.tag);
            let layout = self.image(&name, component, program, architecture, &root)?;
            Ok(Built { name, architecture, layout })
        };
        programs.into_iter().map(build).collect()
    }

    fn image(
        &self,
        name: &str,
        component: Component,
        program: Vec<u8>,
        architecture: &str,
        root: &Layer,
    ) -> Result<Layout> {
        let file = Entry::File { mode: 0o755, content: program };
        let notices = Entry::File { mode: 0o644, content: self.notices.clone().into_bytes() };
        let tree = Tree::from([
            (component.program.to_owned(), file),
            ("usr/share/doc/gpu-migrate/THIRD-PARTY".to_owned(), notices),
        ]);
        let layer = Layer::new(&tree, self.created)?;
        let label = |key, value: &str| (key, value.to_owned());
        Image {
            name,
            architecture,
            created: self.created,
            layers: vec![root, &layer],
            entrypoint: vec![&format!("/{}", component.program)],
            arguments: Vec::new(),
            environment: Vec::new(),
            user: component.user,
            labels: BTreeMap::from([
                label("org.opencontainers.image.title", component.program),
                label("org.opencontainers.image.description", component.description),
                label("org.opencontainers.image.version", &self.tag),
                label("org.opencontainers.image.revision", &self.revision),
                label("org.opencontainers.image.created", &self.created.to_string()),
                label("org.opencontainers.image.licenses", env!("CARGO_PKG_LICENSE")),
                label("org.opencontainers.image.vendor", "gpu-migrate"),
            ]),
        }
        .layout()
    }
}

fn read(path: &Path) -> Result<Vec<u8>> {
    fs::read(path).with_context(|| {
        format!("cannot read {}; build the programs first: cargo build --profile dist --bins", path.display())
    })
}

fn architecture_of_all(programs: &[(Component, Vec<u8>)]) -> Result<&'static str> {
    let mut all = Vec::new();
    for (component, content) in programs {
        let one = architecture(content).with_context(|| format!("cannot use {}", component.program))?;
        all.push((component.program, one));
    }
    let first = all.first().context("there are no components")?.1;
    ensure!(all.iter().all(|(_, one)| *one == first), "programs of different architectures: {all:?}");
    Ok(first)
}

/// Go's name of the machine that an ELF program is for: its header's `e_machine`, at byte 18.
///
/// # Errors
/// If it is none, or of a machine that no image is made for.
pub fn architecture(program: &[u8]) -> Result<&'static str> {
    ensure!(program.starts_with(b"\x7fELF"), "it is no ELF program");
    match program.get(18..20) {
        Some([0x3e, 0]) => Ok("amd64"),
        Some([0xb7, 0]) => Ok("arm64"),
        other => bail!("it is for machine {other:02x?}; images are made for amd64 and arm64"),
    }
}
