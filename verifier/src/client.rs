//! The programs that allocate: `client/client.c`, which describes the steps, and `client/client.py`. Thin.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use serde::Deserialize;

const PROGRAM: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/client"));
const PYTHON: &str = include_str!("../client/client.py");

/// The CUDA versions that the C client speaks for, and what they are called in reports.
pub const CUDA: [(u32, &str); 3] =
    [(11000, "C, CUDA 11 (exported names)"), (12000, "C, CUDA 12"), (13000, "C, CUDA 13")];

/// Why a client could not be asked.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not start.
    #[error("cannot start {program}: {source}")]
    Start { program: String, source: io::Error },
    /// A call failed that every program needs.
    #[error("{what} answered {code}")]
    Call { what: String, code: i32 },
    /// It ended early.
    #[error("it ended with {status}: {last}")]
    Ended { status: String, last: String },
    /// Its answer is none of ours.
    #[error("it answered {line:?}: {source}")]
    Answer { line: String, source: serde_json::Error },
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// An answer to one step. Memory is in MiB, codes are those of CUDA's `CUresult`.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(tag = "step", rename_all = "kebab-case")]
pub enum Answer {
    Take {
        allocator: String,
        mib: u64,
        code: i32,
    },
    /// What `cuMemGetInfo` says, and `cuDeviceTotalMem`.
    Info {
        free: u64,
        total: u64,
        device: u64,
    },
    /// The file that has the function of this name.
    Entry {
        name: String,
        file: String,
    },
    Hold,
    Version {
        bindings: String,
    },
    Failed {
        what: String,
        code: i32,
    },
}

/// What clients are given.
#[derive(Clone, Debug)]
pub struct Setting {
    /// The memory that the container was promised.
    pub limit_mib: u64,
    /// Added to their environment.
    pub environment: Vec<(String, String)>,
}

impl Setting {
    /// How much is allocated at once: a 32nd of the limit, whole pages of 2 MiB.
    #[must_use]
    pub const fn step_mib(&self) -> u64 {
        let step = self.limit_mib / 64 * 2;
        if step < 2 { 2 } else { step }
    }

    /// How much is tried to allocate: so much more than the limit that it cannot be rounding, and no more, since others have the
    /// rest of the card.
    #[must_use]
    pub const fn most_mib(&self) -> u64 {
        self.limit_mib + 2 * self.step_mib()
    }
}

/// A program to start with steps.
#[derive(Clone, Debug)]
pub struct Client {
    /// As reports name it.
    pub name: String,
    program: PathBuf,
    arguments: Vec<String>,
}

/// Writes the clients into a folder: the program and the Python client.
///
/// # Errors
/// The system's.
pub fn unpack(folder: &Path) -> io::Result<(PathBuf, PathBuf)> {
    let write = |name: &str, content: &[u8]| {
        let path = folder.join(name);
        let mut file = std::fs::OpenOptions::new().write(true).create_new(true).mode(0o755).open(&path)?;
        file.write_all(content).map(|()| path)
    };
    Ok((write("client", PROGRAM)?, write("client.py", PYTHON.as_bytes())?))
}

impl Client {
    /// The C client of each CUDA version.
    #[must_use]
    pub fn of_c(program: &Path) -> Vec<Self> {
        let client = |(version, name): (u32, &str)| Self {
            name: name.to_owned(),
            program: program.to_path_buf(),
            arguments: vec![version.to_string()],
        };
        CUDA.map(client).into()
    }

    /// The client of the CUDA bindings that this interpreter has.
    ///
    /// # Errors
    /// Where it has none.
    pub fn of_python(interpreter: &Path, script: &Path, setting: &Setting) -> Result<Self, Error> {
        let (program, arguments) = (interpreter.to_path_buf(), vec![script.display().to_string()]);
        let mut client = Self { name: interpreter.display().to_string(), program, arguments };
        for answer in client.run(setting, &["version".to_owned()])? {
            if let Answer::Version { bindings } = answer {
                client.name = format!("Python, cuda-bindings {bindings}");
            }
        }
        Ok(client)
    }

    fn start(&self, setting: &Setting, steps: &[String], input: Stdio) -> Result<Child, Error> {
        Command::new(&self.program)
            .args(&self.arguments)
            .arg(setting.step_mib().to_string())
            .args(steps)
            .envs(setting.environment.iter().map(|(name, value)| (name, value)))
            .stdin(input)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .map_err(|source| Error::Start { program: self.program.display().to_string(), source })
    }

    /// Runs it to its end.
    ///
    /// # Errors
    /// Where it fails, or a call that no program can do without.
    pub fn run(&self, setting: &Setting, steps: &[String]) -> Result<Vec<Answer>, Error> {
        let output = self.start(setting, steps, Stdio::null())?.wait_with_output()?;
        let answers = answers(&String::from_utf8_lossy(&output.stdout))?;
        if output.status.success() {
            return Ok(answers);
        }
        Err(ended(&output.status.to_string(), &String::from_utf8_lossy(&output.stderr)))
    }

    /// Runs it until it has done these steps, and keeps it, with what it took.
    ///
    /// # Errors
    /// As [`run`](Self::run).
    pub fn hold(&self, setting: &Setting, steps: &[String]) -> Result<Held, Error> {
        let mut steps = steps.to_vec();
        steps.push("hold".to_owned());
        let mut held = Held { child: self.start(setting, &steps, Stdio::piped())?, answers: Vec::new() };
        let output = held.child.stdout.take();
        for line in BufReader::new(output.ok_or_else(|| io::Error::other("no standard output"))?).lines() {
            for answer in answers(&line?)? {
                if answer == Answer::Hold {
                    return Ok(held);
                }
                held.answers.push(answer);
            }
        }
        let mut errors = String::new();
        if let Some(output) = &mut held.child.stderr {
            output.read_to_string(&mut errors)?;
        }
        Err(ended(&held.child.wait()?.to_string(), &errors))
    }
}

/// A client that keeps what it took. Dropped, it is killed, and is gone when that returns.
#[derive(Debug)]
pub struct Held {
    child: Child,
    pub answers: Vec<Answer>,
}

impl Held {
    /// Ends it as programs end.
    ///
    /// # Errors
    /// The system's.
    pub fn end(mut self) -> io::Result<()> {
        drop(self.child.stdin.take());
        self.child.wait().map(drop)
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        // Already gone, then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn ended(status: &str, errors: &str) -> Error {
    let last = errors.lines().rfind(|line| !line.trim().is_empty()).unwrap_or("it wrote no error");
    Error::Ended { status: status.to_owned(), last: last.to_owned() }
}

fn answers(text: &str) -> Result<Vec<Answer>, Error> {
    let mut all = Vec::new();
    // Limiters write to standard output, too.
    for line in text.lines().filter(|line| line.starts_with("{\"step\"")) {
        match serde_json::from_str(line).map_err(|source| Error::Answer { line: line.to_owned(), source })? {
            Answer::Failed { what, code } => return Err(Error::Call { what, code }),
            answer => all.push(answer),
        }
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]
    use super::*;

    #[test]
    fn what_others_print_is_passed_over_and_a_failed_call_named() {
        let text = "[limiter] loaded\n{\"step\":\"take\",\"allocator\":\"vmm\",\"mib\":64,\"code\":2}\n";
        let take = Answer::Take { allocator: "vmm".into(), mib: 64, code: 2 };
        assert_eq!(answers(text).unwrap(), [take]);
        let error = answers("{\"step\":\"failed\",\"what\":\"cuInit\",\"code\":100}").unwrap_err();
        assert_eq!(error.to_string(), "cuInit answered 100");
        assert!(answers("{\"step\":\"take\"}").is_err());
    }

    #[test]
    fn a_step_is_of_whole_pages_and_two_of_them_are_tried_beyond_the_limit() {
        for (limit, step, most) in [(256, 8, 272), (1024, 32, 1088), (80896, 2528, 85952), (1, 2, 5)] {
            let setting = Setting { limit_mib: limit, environment: Vec::new() };
            assert_eq!((setting.step_mib(), setting.most_mib()), (step, most), "{limit}");
        }
    }
}
