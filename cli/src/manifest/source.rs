//! From the paths of a command line to the texts behind them.

use super::Source;
use std::fs;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use thiserror::Error;

/// The dump of a cluster of 50,000 pods has a third of this; a device given by mistake has more.
const MAX_BYTES: u64 = 1 << 30;

/// Endings that a folder is searched for. A file that is named itself may be called anything.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// One text and where it came from.
#[derive(Debug)]
pub struct Input {
    pub source: Source,
    pub text: String,
}

/// A path that could not be read.
#[derive(Debug, Error)]
pub enum SourceError {
    #[error("{source_name}: cannot be read: {error}")]
    Io { source_name: String, error: io::Error },
    #[error("{source_name}: not UTF-8 text: byte {offset} is not valid; expected YAML or JSON in UTF-8")]
    NotUtf8 {
        source_name: String,
        /// Offset of the first bad byte.
        offset: usize,
    },
    /// Far larger than any manifest.
    #[error("{source_name}: larger than {} MiB; expected Kubernetes manifests", MAX_BYTES >> 20)]
    TooLarge { source_name: String },
    #[error("{}: no file ending in .yaml, .yml or .json in this folder{}", path.display(), if *recursive { "" } else { "; add -R to search its subfolders too" })]
    EmptyFolder { path: PathBuf, recursive: bool },
}

/// Reads every path: `-` is stdin, a folder stands for its manifests in the order of their names.
///
/// Returns what could be read and what could not: one bad file must not hide the others.
pub fn read_inputs(
    paths: &[PathBuf],
    recursive: bool,
    stdin: &mut dyn Read,
) -> (Vec<Input>, Vec<SourceError>) {
    let (mut inputs, mut errors) = (Vec::new(), Vec::new());
    for path in paths {
        let found = if path.as_os_str() == "-" {
            vec![read_text(Source::Stdin, stdin)]
        } else if path.is_dir() {
            read_folder(path, recursive)
        } else {
            vec![read_file(path)]
        };
        for one in found {
            match one {
                Ok(input) => inputs.push(input),
                Err(error) => errors.push(error),
            }
        }
    }
    (inputs, errors)
}

fn read_folder(path: &Path, recursive: bool) -> Vec<Result<Input, SourceError>> {
    let mut files = Vec::new();
    if let Err(error) = collect_files(path, recursive, &mut files) {
        return vec![Err(error)];
    }
    if files.is_empty() {
        return vec![Err(SourceError::EmptyFolder { path: path.to_owned(), recursive })];
    }
    files.iter().map(|file| read_file(file)).collect()
}

/// Symbolic links to folders are not followed below the folder that was named: they can go in circles.
fn collect_files(folder: &Path, recursive: bool, files: &mut Vec<PathBuf>) -> Result<(), SourceError> {
    let failed = |error| SourceError::Io { source_name: folder.display().to_string(), error };
    let mut entries = fs::read_dir(folder)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .map_err(failed)?
        .into_iter()
        .map(|entry| entry.path())
        .collect::<Vec<_>>();
    entries.sort();
    for path in entries {
        let is_link = path.is_symlink();
        if path.is_dir() {
            if recursive && !is_link {
                collect_files(&path, recursive, files)?;
            }
        } else if path.extension().and_then(|e| e.to_str()).is_some_and(|e| ENDINGS.contains(&e)) {
            files.push(path);
        }
    }
    Ok(())
}

fn read_file(path: &Path) -> Result<Input, SourceError> {
    let mut file = fs::File::open(path)
        .map_err(|error| SourceError::Io { source_name: path.display().to_string(), error })?;
    read_text(Source::File(path.to_owned()), &mut file)
}

fn read_text(source: Source, from: &mut dyn Read) -> Result<Input, SourceError> {
    let mut bytes = Vec::new();
    from.take(MAX_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| SourceError::Io { source_name: source.to_string(), error })?;
    if bytes.len() as u64 > MAX_BYTES {
        return Err(SourceError::TooLarge { source_name: source.to_string() });
    }
    let text = String::from_utf8(bytes).map_err(|error| SourceError::NotUtf8 {
        source_name: source.to_string(),
        offset: error.utf8_error().valid_up_to(),
    })?;
    Ok(Input { source, text })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(inputs: &[Input]) -> Vec<String> {
        inputs
            .iter()
            .map(|i| match &i.source {
                Source::File(path) => path.file_name().unwrap().to_string_lossy().into_owned(),
                Source::Stdin | Source::Cluster => "-".to_owned(),
            })
            .collect()
    }

    #[test]
    fn a_folder_gives_its_manifests_in_order_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["b.yaml", "a.json", "c.yml", "README.md", "noending"] {
            fs::write(folder.path().join(name), "{}").unwrap();
        }
        fs::create_dir(folder.path().join("sub")).unwrap();
        fs::write(folder.path().join("sub/d.yaml"), "{}").unwrap();

        let (flat, errors) = read_inputs(&[folder.path().to_owned()], false, &mut io::empty());
        assert!(errors.is_empty());
        assert_eq!(names(&flat), ["a.json", "b.yaml", "c.yml"]);

        let (deep, _) = read_inputs(&[folder.path().to_owned()], true, &mut io::empty());
        assert_eq!(names(&deep), ["a.json", "b.yaml", "c.yml", "d.yaml"]);
    }

    #[cfg(unix)]
    #[test]
    fn a_link_in_a_circle_ends() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("a.yaml"), "{}").unwrap();
        std::os::unix::fs::symlink(folder.path(), folder.path().join("again")).unwrap();
        let (found, errors) = read_inputs(&[folder.path().to_owned()], true, &mut io::empty());
        assert_eq!((found.len(), errors.len()), (1, 0));
    }

    #[test]
    fn one_bad_path_does_not_hide_the_others() {
        let folder = tempfile::tempdir().unwrap();
        let good = folder.path().join("good");
        fs::write(&good, "kind: Pod").unwrap();
        let binary = folder.path().join("binary.yaml");
        fs::write(&binary, b"ab\xff").unwrap();
        let empty = folder.path().join("empty");
        fs::create_dir(&empty).unwrap();

        let paths = [folder.path().join("absent"), binary, empty, good, PathBuf::from("-")];
        let (found, errors) = read_inputs(&paths, false, &mut "kind: Job".as_bytes());
        assert_eq!(names(&found), ["good", "-"]);
        let errors = errors.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert!(errors[0].contains("absent: cannot be read"), "{errors:?}");
        assert!(errors[1].contains("byte 2 is not valid"), "{errors:?}");
        assert!(errors[2].contains("add -R"), "{errors:?}");
    }
}
