//! Servers on the loopback that the network door may lead to, and that tell what they saw.

use std::{
    io::{BufRead as _, BufReader, Read, Write},
    net::{Ipv4Addr, TcpListener, TcpStream, UdpSocket},
    sync::{
        atomic::{AtomicBool, Ordering},
        Arc, Mutex, PoisonError,
    },
    thread,
};

/// A server of HTTP/1.1 that answers each request with what it was asked: the request's head, and its body after it.
pub struct Origin {
    port: u16,
    seen: Arc<Mutex<Vec<String>>>,
    stopped: Arc<AtomicBool>,
}

/// What wraps an accepted connection.
pub type Wrap = Arc<dyn Fn(TcpStream) -> Box<dyn Both> + Send + Sync>;

/// A stream in both directions.
pub trait Both: Read + Write + Send {}

impl<T: Read + Write + Send> Both for T {}

impl Origin {
    /// Without TLS.
    pub fn plain() -> Origin {
        Origin::behind(Arc::new(|stream| Box::new(stream)))
    }

    /// Behind whatever wraps its connections.
    ///
    /// # Panics
    /// Without a port to be had.
    pub fn behind(wrap: Wrap) -> Origin {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback has a port");
        let port = listener.local_addr().expect("a listener has an address").port();
        let (seen, stopped) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (noted, over) = (Arc::clone(&seen), Arc::clone(&stopped));
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                if over.load(Ordering::SeqCst) {
                    return;
                }
                let (wrap, noted) = (Arc::clone(&wrap), Arc::clone(&noted));
                thread::spawn(move || serve(wrap(stream), &noted));
            }
        });
        Origin { port, seen, stopped }
    }

    /// Its port.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// The heads of the requests so far.
    pub fn seen(&self) -> Vec<String> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.stopped.store(true, Ordering::SeqCst);
        // It looks when the next one connects.
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port));
    }
}

fn serve(stream: Box<dyn Both>, noted: &Mutex<Vec<String>>) {
    let mut stream = BufReader::new(stream);
    loop {
        let mut head = String::new();
        let mut length = 0;
        loop {
            let mut line = String::new();
            match stream.read_line(&mut line) {
                Ok(1..) => {}
                Ok(0) | Err(_) => return,
            }
            if let Some(value) = line.to_ascii_lowercase().strip_prefix("content-length:") {
                length = value.trim().parse().unwrap_or(0);
            }
            if line == "\r\n" {
                break;
            }
            head.push_str(&line);
        }
        let mut body = vec![0; length];
        if stream.read_exact(&mut body).is_err() {
            return;
        }
        noted.lock().unwrap_or_else(PoisonError::into_inner).push(head.clone());
        let told = [head.as_bytes(), &body].concat();
        let first = head.lines().next().unwrap_or_default();
        let content = if first.starts_with("HEAD ") { &[][..] } else { &told[..] };
        let status = format!("HTTP/1.1 200 OK\r\nX-Origin: yes\r\nContent-Length: {}\r\n\r\n", told.len());
        let answered = stream.get_mut().write_all(&[status.as_bytes(), content].concat());
        if answered.and_then(|()| stream.get_mut().flush()).is_err() {
            return;
        }
    }
}

/// A name server that says of every name below `.test` that it is at the loopback, and keeps what it was asked.
pub struct NameServer {
    port: u16,
    asked: Arc<Mutex<Vec<String>>>,
}

impl NameServer {
    /// One that says so.
    ///
    /// # Panics
    /// Without a port to be had.
    pub fn new() -> NameServer {
        let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("the loopback has a port");
        let port = socket.local_addr().expect("a socket has an address").port();
        let asked = Arc::new(Mutex::new(Vec::new()));
        let noted = Arc::clone(&asked);
        thread::spawn(move || {
            let mut packet = [0; 1500];
            while let Ok((length, whom)) = socket.recv_from(&mut packet) {
                let Some((name, reply)) = answer(&packet[..length]) else { continue };
                noted.lock().unwrap_or_else(PoisonError::into_inner).push(name);
                let _ = socket.send_to(&reply, whom);
            }
        });
        NameServer { port, asked }
    }

    /// Its address, as `--resolver` takes it.
    pub fn address(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }

    /// The names that it was asked for.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Default for NameServer {
    fn default() -> NameServer {
        NameServer::new()
    }
}

/// The name in a question (RFC 1035, section 4.1), and the message that says it is at the loopback.
fn answer(packet: &[u8]) -> Option<(String, Vec<u8>)> {
    let mut labels = Vec::new();
    let mut at = 12;
    loop {
        let length = usize::from(*packet.get(at)?);
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(packet.get(at + 1..at + 1 + length)?).into_owned());
        at += 1 + length;
    }
    let question = packet.get(12..at + 5)?;
    let is_for_address = question.ends_with(&[0, 1, 0, 1]);
    let count = u8::from(is_for_address);
    let mut reply = packet[..2].to_vec();
    reply.extend([0x81, 0x80, 0, 1, 0, count, 0, 0, 0, 0]);
    reply.extend(question);
    if is_for_address {
        // The name again by reference, an address of the Internet's, good for a minute, four bytes.
        reply.extend([0xc0, 12, 0, 1, 0, 1, 0, 0, 0, 60, 0, 4, 127, 0, 0, 1]);
    }
    Some((labels.join("."), reply))
}
