/* Browsers refuse workers to a page that was opened from disk. There, a hidden frame plays the worker of the search. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.appendChild(frame)
      this.inside = frame.contentWindow
      this.ready = new Promise(done => { window.__frameReady = done })
      window.__fromFrame = data => {
        const event = new MessageEvent("message", { data })
        this.dispatchEvent(event)
        if (this.onmessage) this.onmessage(event)
      }
      this.inside.document.open()
      this.inside.document.write(
        "<script>postMessage = data => parent.__fromFrame(data)</" + "script>" +
        `<script src="${url}" onload="parent.__frameReady()"></` + "script>")
      this.inside.document.close()
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() { this.inside.frameElement.remove() }
  }
